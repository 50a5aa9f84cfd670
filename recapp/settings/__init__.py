"""What settings there are, what values they take, and how `--help` and errors describe them."""
