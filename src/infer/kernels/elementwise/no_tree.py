"""The mark of a window without branches, in a file without torch: orders and kernels both need it."""

NO_TREE = 1 << 30  # start of the tree in a window without branches: after every position
