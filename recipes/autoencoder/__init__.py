"""Semi-supervised autoencoders of images."""
