"""What a run is: the keys of a recipe, their checks, recipes and presets."""
