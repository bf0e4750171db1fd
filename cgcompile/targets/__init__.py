"""What can be built for and by which recorder, and the record that every target gets.
Below: the cpu target, and what both recorders of a cuda target share.
"""
