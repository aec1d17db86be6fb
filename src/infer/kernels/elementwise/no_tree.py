"""The mark of a window without branches, in a file without torch: orders and kernels both need it."""

NO_TREE = 1 << 30  # position at which the window of a row without branches begins: after every one
