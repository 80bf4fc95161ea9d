"""Reading rollouts that other projects wrote: peers' dumps -> trajectories.

`open_trajectories` is the one entrance for every command that reads rollouts, our own file
included; `FORMATS` is the table of formats. `docs/converters.md` describes each of them.
"""

from evenhand.convert.formats import FORMATS, Format, open_trajectories, recognise

__all__ = ["FORMATS", "Format", "open_trajectories", "recognise"]
