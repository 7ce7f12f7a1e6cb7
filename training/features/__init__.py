"""What is read of the frozen target, and where it is kept between epochs."""
