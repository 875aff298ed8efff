"""Starting the ranks and binding them to processors and memory."""
