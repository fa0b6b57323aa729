//! The secrets of a cluster, which its processes prove to each other, and the file that has them.
//!
//! The file has one secret a line. A process proves the first, and accepts each. Blank lines and
//! lines that begin with `#` do not count.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use downbeat_frontend::own_file::{SECRET_BYTES, add_part, new_secret, text_of};
use downbeat_frontend::reloaded::{Reloaded, read_bounded};
use downbeat_service::options::cluster_options::ClusterOptions;
use ring::hmac;

/// The fewest characters of a secret: of 32 bytes in base64, and in hexadecimal digits.
const LEAST: usize = 43;
const LEAST_HEX: usize = 2 * SECRET_BYTES;
/// The most characters of a secret.
const LONGEST: usize = 1024;
/// The fewest different characters of a secret. Random ones have more.
const DIFFERENT: usize = 8;
/// The most secrets of a file.
const MOST: usize = 8;
/// Largest file of secrets, bytes.
const LARGEST_FILE: u64 = 64 << 10;
/// The command that adds a secret to a file, for messages.
const MAKES_ONE: &str = "`downbeat key secret FILE` adds a secret to a file";

/// The secrets that a process knows; none: it trusts each peer.
#[derive(Clone, Debug, Default)]
pub struct Secrets(Vec<hmac::Key>);

impl Secrets {
    /// The secret that the process proves; `None`: it proves nothing.
    pub fn first(&self) -> Option<&hmac::Key> {
        self.0.first()
    }

    /// All secrets, each of which a peer may prove.
    pub fn all(&self) -> std::slice::Iter<'_, hmac::Key> {
        self.0.iter()
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// If the text has no secret, too many, or a wrong one.
    pub fn parse(text: &str) -> anyhow::Result<Secrets> {
        let lines = text.lines().map(str::trim).enumerate();
        let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        let key = |(number, line): (usize, &str)| {
            check(line).with_context(|| format!("line {}", number + 1))?;
            Ok(hmac::Key::new(hmac::HMAC_SHA256, line.as_bytes()))
        };
        let keys: Vec<_> = lines.map(key).collect::<anyhow::Result<_>>()?;
        ensure!(!keys.is_empty(), "no line has a secret; {MAKES_ONE}");
        ensure!(
            keys.len() <= MOST,
            "there are {} secrets, and at most {MOST} are allowed: delete old ones",
            keys.len()
        );
        Ok(Secrets(keys))
    }

    fn read(file: &Path) -> anyhow::Result<Secrets> {
        let cannot = || format!("{} is no file of cluster secrets", file.display());
        let bytes = read_bounded(file, LARGEST_FILE).with_context(|| format!("--cluster-secret ({MAKES_ONE})"))?;
        Secrets::parse(std::str::from_utf8(&bytes).with_context(cannot)?).with_context(cannot)
    }
}

/// Checks that a secret is as long as 32 random bytes, and has no strange characters. The message
/// does not show the secret.
fn check(secret: &str) -> anyhow::Result<()> {
    if !secret.chars().all(|c| c.is_ascii_graphic()) {
        bail!("a secret has letters, digits and punctuation of ASCII, and no space; {MAKES_ONE}");
    }
    let (least, form) = match secret.chars().all(|c| c.is_ascii_hexdigit()) {
        true => (LEAST_HEX, " if all are hexadecimal digits"),
        false => (LEAST, ""),
    };
    if !(least..=LONGEST).contains(&secret.len()) {
        bail!(
            "the secret has {} characters, and needs {least} to {LONGEST}{form}, as {SECRET_BYTES} random bytes have; \
             {MAKES_ONE}",
            secret.len()
        );
    }
    let mut different: Vec<char> = secret.chars().collect();
    different.sort_unstable();
    different.dedup();
    ensure!(different.len() >= DIFFERENT, "the secret is not random; {MAKES_ONE}");
    Ok(())
}

/// The secrets of a process, which follow their file.
#[derive(Clone)]
pub struct SecretFile(Option<Arc<Reloaded<Secrets>>>);

impl SecretFile {
    /// The secrets of the options' file. A task on the caller's runtime follows the file.
    ///
    /// # Errors
    /// If the file cannot be read, or has no secret or a wrong one.
    pub fn open(options: &ClusterOptions) -> anyhow::Result<Self> {
        let Some(file) = options.secret.clone() else { return Ok(SecretFile(None)) };
        let of_reader = file.clone();
        let secrets = Reloaded::follow("cluster secrets", vec![file.clone()], move || Secrets::read(&of_reader))?;
        if fs::metadata(&file).is_ok_and(|meta| meta.mode() & 0o006 != 0) {
            let file = file.display();
            tracing::warn!(%file, "all users of this machine may read the cluster's secret: chmod 600 {file}");
        }
        Ok(SecretFile(Some(secrets)))
    }

    /// The secrets as they are now.
    pub fn get(&self) -> Arc<Secrets> {
        self.0.as_ref().map_or_else(Arc::default, |secrets| secrets.get())
    }
}

/// Adds a new secret to a file, as its last line. A file that does not exist is made, for its owner
/// alone. Returns the number of secrets in the file.
///
/// # Errors
/// If the file has something else than secrets, has too many, or cannot be written.
pub fn add_secret(file: &Path) -> anyhow::Result<usize> {
    let (text, mut count) = (text_of(file, LARGEST_FILE)?, 0);
    // The file must stay one that the processes read.
    add_part(file, &text, &format!("{}\n", new_secret()?), |text| {
        let cannot = || format!("{} cannot take one more secret", file.display());
        count = Secrets::parse(text).with_context(cannot)?.0.len();
        Ok(())
    })?;
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEX: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    fn of(text: &str) -> Secrets {
        Secrets::parse(text).unwrap()
    }

    #[test]
    fn made_secrets_are_read_and_a_second_one_goes_behind_the_first() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("cluster.secret");
        assert_eq!(add_secret(&file).unwrap(), 1);
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
        let first = fs::read_to_string(&file).unwrap();
        assert_eq!(add_secret(&file).unwrap(), 2);
        assert!(fs::read_to_string(&file).unwrap().starts_with(&first));
        assert_eq!(Secrets::read(&file).unwrap().all().len(), 2);
        assert_ne!(new_secret().unwrap(), new_secret().unwrap());
        (2..MOST).for_each(|count| assert_eq!(add_secret(&file).unwrap(), count + 1));
        assert!(format!("{:#}", add_secret(&file).unwrap_err()).contains("delete old ones"));
        fs::write(&file, "something else").unwrap();
        assert!(format!("{:#}", add_secret(&file).unwrap_err()).contains("line 1"));
        assert_eq!(fs::read_to_string(&file).unwrap(), "something else");
    }

    #[test]
    fn a_file_has_comments_and_wrong_lines_are_named_without_being_shown() {
        assert_eq!(of(&format!("# ours\n\n  {HEX}\r\n{HEX}x\n")).all().len(), 2);
        let short = &HEX[..42];
        for (text, said) in [
            ("", "no line has a secret"),
            ("# only words", "no line has a secret"),
            (short, "has 42 characters, and needs 64 to 1024 if all are hexadecimal digits"),
            ("hunter2", "has 7 characters, and needs 43 to 1024,"),
            (&HEX[..63], "needs 64"),
            (&"ab".repeat(40), "not random"),
            (&format!("{HEX}\nä{HEX}"), "line 2: a secret has letters"),
            (&format!("{HEX}\n{HEX} x"), "line 2: a secret has letters"),
            (&format!("{HEX}x\n").repeat(9), "there are 9 secrets"),
            (&format!("x{HEX}").repeat(20), "has 1300 characters"),
        ] {
            let error = format!("{:#}", Secrets::parse(text).unwrap_err());
            assert!(error.contains(said) && !error.contains("hunter2") && !error.contains(short), "{text}: {error}");
        }
    }

    #[test]
    fn a_missing_file_is_named_with_the_command_that_makes_one() {
        let options = ClusterOptions { secret: Some("/nowhere/cluster.secret".into()), ..ClusterOptions::default() };
        let error = format!("{:#}", SecretFile::open(&options).err().unwrap());
        assert!(error.contains("/nowhere/cluster.secret") && error.contains("downbeat key secret"), "{error}");
        assert!(SecretFile::open(&ClusterOptions::default()).unwrap().0.is_none());
    }
}
