"""Every setting: its default, help, flag and YAML key come from one field.

resolve.py        EngineConfig + machine + model -> ResolvedConfig: every setting has a value
unused.py         settings that have no effect because of others, for a warning
machine_rules.py  the facts about a machine and a model, and the settings that cannot work with them
settings.py       the sections of an engine, and the settings that exclude or need each other
server.py         the section of a server
knobs.py          the parts of a knob: flag, YAML key, keyword, row of the docs; --config files
foreign.py        settings of other engines: what to use here in their place, or why they are refused
backends.py       the backends of attention and MLP, by device
defaults.py       the defaults that depend on the device and on the model's size

Each file imports only files below it in this list (`tests/unit/test_layering.py` finds cycles).
"""
