"""What stands between two products in a decoder: operations on whole rows."""
