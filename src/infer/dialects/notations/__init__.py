"""The notations of tool calls: a file for each, with the coroutine that reads its calls."""
