"""Measurements of whole tasks, results of `mpjax bench`, and the docs' tables made from them."""
