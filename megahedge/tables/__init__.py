"""The paper's tables as runs: what a row is, the commands behind it, and the table that comes of them."""
