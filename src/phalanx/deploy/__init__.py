# SPDX-License-Identifier: Apache-2.0
"""Ways of deployment: Kubernetes and Compose manifests as pure text, Ray."""
