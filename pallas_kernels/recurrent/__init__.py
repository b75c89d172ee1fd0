"""Operations of mixers that keep a state of one size for each sequence."""
