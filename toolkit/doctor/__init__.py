"""Does a script learn the same in one process and in several? And if not, why not?

`probe` runs inside every process of the user's script and writes down what it sees, `evidence` puts the ranks'
records together, `compare` measures how far two runs are apart, `causes` says what that means, `examine` runs it all.
"""
