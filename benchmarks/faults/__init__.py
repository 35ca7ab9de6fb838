"""Silent bugs of training scripts (`silent_bugs/`) and mutations of the toolkit."""
