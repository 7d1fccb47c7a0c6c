"""Read rows of any shape, bring them to one of four formats, and split them."""
