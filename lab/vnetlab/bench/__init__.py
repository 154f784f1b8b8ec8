"""The bench: vnet against its alternatives, interleaved within one run.

`contenders` and `vhost` bring up what is measured, `guests` virtual machines on it; `workload` generates load, `usage`
measures CPU time. `suite` lists the cases of each bench, `runner` runs the contenders of a case in turn, `result` keeps
the figures, `environment` describes the machine. `report` writes tables, `plot` draws, `bars` computes which bars are
met, `pages` publishes all of that in docs/. `compare` runs two revisions of vnet and judges differences. `command` is
the command line.

Every case has its own underlay. In each round every contender is brought up, measured and taken down, in the same
order: drift of the machine meets all of them, and no daemon runs while another is measured. Figures are medians over
the rounds, with the smallest and the largest.
"""
