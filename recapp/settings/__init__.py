"""What settings there are, what values they take, and how `--help` and errors speak of them."""
