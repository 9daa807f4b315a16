"""The command `everstep`; torch is imported only by the sub-commands that train."""
