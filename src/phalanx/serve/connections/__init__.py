# SPDX-License-Identifier: Apache-2.0
"""Between the network and the routes: the port, how many connections there may be and how long they may take, keys and origins."""
