"""The parts of :mod:`vlmfast.media`: what a file is, opening sources, pictures, video decoders."""
