"""Does a script learn the same in one process and in several? And if not, why not?

`watch` runs a script under a `recorder`, which `attach` puts between the script and its libraries; it writes a
`record`. `evidence` puts the ranks' records together, `compare` measures how far two runs are apart, `causes` says what
that means, and `examine` runs it all.
"""
