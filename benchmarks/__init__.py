"""What `mpjax bench` measured, and the page of the docs that is written from it."""
