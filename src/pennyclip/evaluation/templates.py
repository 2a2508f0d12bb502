"""Sentences around a class name; a class is the mean of their embeddings (Radford et al. 2021,
section 3.1.4, who found that several beat one)."""

# chosen: plain, without an article, so that "apple", "scissors" and "musical instrument" all fit.
TEMPLATES = (
    "{}",
    "a photo of {}",
    "a picture of {}",
    "a drawing of {}",
    "a close view of {}",
    "an image that shows {}",
    "{}, seen from some distance",
)
