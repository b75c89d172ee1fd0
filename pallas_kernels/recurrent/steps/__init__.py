"""One token of each row: states are read and written once, at the places of the rows."""
