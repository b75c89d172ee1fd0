"""Operations of recurrent mixers, which keep a fixed-size state for each sequence."""
