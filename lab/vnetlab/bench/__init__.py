"""The bench: vnet against its alternatives, interleaved within one run.

`contenders` and `vhost` bring up the contenders, `guests` virtual machines on them; `workload` generates load, `usage`
measures CPU time. `suite` lists the cases of each bench, `runner` runs the contenders of a case in turn, `result`
stores the figures, `environment` describes the machine. `report` writes tables, `plot` draws plots, `bar` computes
which of the `bars` are met, `pages` publishes all of that in docs/. `compare` runs two revisions of vnet and tests
differences. `command` is the command line.

Every case has a separate underlay. In each round every contender is brought up, measured and taken down, in the same
order: drift of the machine affects all contenders equally, and no daemon runs while another is measured. Figures are
medians over the rounds, with the minimum and the maximum.
"""
