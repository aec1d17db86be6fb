"""Every setting: its default, help, flag and YAML key come from one field.

settings.py    the sections: load, cache, scheduler, run, server
knobs.py       what a field becomes: flag, YAML key, keyword, row of the docs; other spellings; --config files
backends.py    what can compute attention and MLP, by device
defaults.py    the defaults that depend on the device and on the model's size
resolve.py     EngineConfig + machine + model -> ResolvedConfig: nothing is left open
"""
