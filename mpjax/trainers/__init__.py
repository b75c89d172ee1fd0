"""Training of heads that draft, and engines for learners of trainers' libraries."""
