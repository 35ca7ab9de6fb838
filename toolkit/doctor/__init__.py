"""Does a script learn the same in one process and in several? And if not, why not?

`examine` starts it all: `watch` runs a script under a `recorder`, which writes a `record`; `compare` puts the records
of all ranks together and measures how far two runs are apart, and `causes` says what that means.
"""
