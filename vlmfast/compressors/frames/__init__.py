"""Methods that choose the frames of a video before encoding."""
