# Install rules: headers, library, find_package(moekit), pkg-config.
