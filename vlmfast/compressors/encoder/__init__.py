"""Methods that act between the blocks of the vision encoder."""
