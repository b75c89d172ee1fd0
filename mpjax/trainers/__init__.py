"""Engines for the learners of trainers' libraries, each of which imports its library."""
