"""Methods that leave views of images out of the vision tower: crops and frames."""
