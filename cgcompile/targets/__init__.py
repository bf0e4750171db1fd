"""What can be built for and by which recorder, the record that every target gets, and the rows and weights that all write alike.
Below: the cpu target, and what both recorders of a cuda target share.
"""
