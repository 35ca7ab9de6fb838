"""Does a script learn the same in one process and in several? And if not, why not?

`examine` is the entry point: `watch` runs a script under a `recorder`, which writes a `record`; `compare` joins the
records of all ranks and measures the distance of two runs, and `causes` explains it.
"""
