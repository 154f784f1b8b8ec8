"""The bench: vnet against its alternatives, in the same run and turn by turn.

`contenders` and `vhost` bring up what is measured, `guests` virtual machines on it; `workload` loads it, `usage` tells
what it costs in processor time. `suite` says which bench has which cases, `runner` takes the contenders of a case in
turn, `result` keeps the figures, `environment` describes the machine, `report` writes tables and `plot` draws.
`compare` does it with two revisions of vnet and tells what differs. `command` is what users call.

How a figure comes about: every case has an underlay of its own. In each round each contender is brought up, measured
and taken down, in the same order, so that whatever drifts on the machine meets all of them, and nobody's daemon runs
while another is measured. Figures are medians over the rounds, with the smallest and the largest.
"""
