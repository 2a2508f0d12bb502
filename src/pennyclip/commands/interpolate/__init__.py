"""Between the start and the end of a fine-tuning: WiSE-FT (Wortsman et al. 2022)."""
