"""Every setting: its default, help, flag and YAML key come from one field.

settings.py    the sections: model, cache, scheduler, engine, server
knobs.py       what a field becomes: flag, YAML key, row of the docs
yaml_file.py   the file of `--config`
"""
