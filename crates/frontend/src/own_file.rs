//! Files of keys and secrets: a command adds to such a file, and its owner alone may read it.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::Context;
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use ring::rand::{SecureRandom, SystemRandom};

use crate::reloaded::read_bounded;

/// Random bytes of a secret.
pub const SECRET_BYTES: usize = 32;

/// Random bytes that nobody can guess.
///
/// # Errors
/// If the system gives no random numbers.
pub fn random<const BYTES: usize>() -> anyhow::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    SystemRandom::new().fill(&mut bytes).ok().context("the system gives no random numbers")?;
    Ok(bytes)
}

/// A new secret: 256 random bits in base64.
///
/// # Errors
/// If the system gives no random numbers.
pub fn new_secret() -> anyhow::Result<String> {
    Ok(BASE64_URL_SAFE_NO_PAD.encode(random::<SECRET_BYTES>()?))
}

/// The text of a file of at most `most` bytes; empty if there is no file.
///
/// # Errors
/// If the file cannot be read, is longer, or is no text.
pub fn text_of(file: &Path, most: u64) -> anyhow::Result<String> {
    let shown = file.display();
    if !fs::exists(file).with_context(|| format!("cannot read {shown}"))? {
        return Ok(String::new());
    }
    String::from_utf8(read_bounded(file, most)?).with_context(|| format!("{shown} is not UTF-8"))
}

/// Adds a part to the `text` of a file, behind the end of the last line. A file that does not exist is
/// made, for its owner alone. `check` judges the whole text first.
///
/// # Errors
/// The errors of `check`; if the file cannot be written.
pub fn add_part(
    file: &Path,
    text: &str,
    part: &str,
    check: impl FnOnce(&str) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let separator = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    let added = format!("{separator}{part}");
    check(&format!("{text}{added}"))?;
    let cannot = || format!("cannot write {}", file.display());
    let mut opened = fs::OpenOptions::new().append(true).create(true).mode(0o600).open(file).with_context(cannot)?;
    opened.write_all(added.as_bytes()).with_context(cannot)
}
