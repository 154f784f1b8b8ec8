"""`lab evaluate`: the experiments of the papers that vnet implements, on the kinds of data paths that exist here.

`papers` lists every table and figure of the papers, with its figures and the experiment that repeats it, or the reason
why none does. `kinds` has the contenders, `options` what cases are made of, `ranks` places MPI ranks on their machines.
`experiments` lists all experiments, whose cases are in `network`, `applications`, `files` and `guests`. The bench's
`runner` measures: every contender in turn, so that drift of the machine affects all equally. `store` keeps a
file per experiment, written after each measurement, so that a second call continues an interrupted one. `report`
compares the figures with the papers', whose differences `reasons` explains, and with the `bars`; `document` writes that
as Markdown and as one HTML page. `command` is the command line.
"""
