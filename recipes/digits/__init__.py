"""Classifiers of images that learn from few labels and many images without one."""
