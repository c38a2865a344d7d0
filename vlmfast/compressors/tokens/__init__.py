"""Methods that reduce visual tokens between the vision encoder and the language model."""
