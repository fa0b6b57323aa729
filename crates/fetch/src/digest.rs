//! Digests of files: the SHA-256 under which the cache keeps a file, and the digest that the hub
//! announces.

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

/// The digest that a server announced for a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Expected {
    /// SHA-256 of the content, in hexadecimal.
    Sha256(String),
    /// The number of a blob in git: SHA-1 of a header and the content.
    GitBlob(String),
}

/// The digests of a file, while its bytes come.
pub(crate) struct Digests {
    sha256: Context,
    blob: Option<Context>,
    expected: Option<Expected>,
}

impl Digests {
    /// The digests of no bytes, of a file that will have `size` bytes.
    pub(crate) fn new(expected: Option<&Expected>, size: Option<u64>) -> Self {
        let blob = match (expected, size) {
            (Some(Expected::GitBlob(_)), Some(size)) => {
                let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {size}\0").as_bytes());
                Some(context)
            }
            _ => None,
        };
        Digests { sha256: Context::new(&SHA256), blob, expected: expected.cloned() }
    }

    /// Takes the next bytes.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.sha256.update(bytes);
        if let Some(blob) = &mut self.blob {
            blob.update(bytes);
        }
    }

    /// The SHA-256. An error is the announced digest and the real one.
    pub(crate) fn finish(self) -> Result<String, (String, String)> {
        let sha256 = hex(self.sha256.finish().as_ref());
        match (self.expected, self.blob) {
            (Some(Expected::Sha256(wanted)), _) if !wanted.eq_ignore_ascii_case(&sha256) => Err((wanted, sha256)),
            (Some(Expected::GitBlob(wanted)), Some(blob)) => {
                let found = hex(blob.finish().as_ref());
                if wanted.eq_ignore_ascii_case(&found) { Ok(sha256) } else { Err((wanted, found)) }
            }
            _ => Ok(sha256),
        }
    }
}

/// The SHA-256 of a text, in hexadecimal.
pub(crate) fn of_text(text: &str) -> String {
    hex(ring::digest::digest(&SHA256, text.as_bytes()).as_ref())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether a text is a digest in hexadecimal, so that it can be the name of a file.
pub(crate) fn is_digest(text: &str) -> bool {
    matches!(text.len(), 40 | 64) && text.bytes().all(|b| b.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_of_other_tools() {
        // sha256sum and git hash-object of "hello\n".
        let sha256 = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        let blob = Expected::GitBlob("ce013625030ba8dba906f756967f9e9ca394464a".to_owned());
        let digest = |expected: &Expected, text: &str| {
            let mut digests = Digests::new(Some(expected), Some(text.len() as u64));
            digests.update(text.as_bytes());
            digests.finish()
        };
        assert_eq!(digest(&blob, "hello\n").unwrap(), sha256);
        assert_eq!(digest(&Expected::Sha256(sha256.to_uppercase()), "hello\n").unwrap(), sha256);
        assert!(digest(&blob, "hallo\n").is_err());
        assert!(digest(&Expected::Sha256(sha256.to_owned()), "hallo\n").is_err());
    }
}
