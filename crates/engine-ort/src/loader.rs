//! The words of the system's loader.

use std::error::Error;

/// The loader's reason for refusing a library. The error's own text lacks it.
pub(crate) fn loader_words(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}
