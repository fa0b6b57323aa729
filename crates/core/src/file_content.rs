//! Checks the bytes of a file that a user brings. Example: a checkout without git-lfs has a small
//! pointer in place of the file. The error tells the user to fetch the file.
//!
//! ```
//! use downbeat_core::file_content::text;
//!
//! assert_eq!(text(b"\xef\xbb\xbfcat\ndog\n"), Ok("cat\ndog\n"));
//! let error = text(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n").unwrap_err();
//! assert!(error.to_string().contains("git lfs pull"));
//! ```

/// Largest git-lfs pointer, bytes (the specification's limit). A longer file is no pointer.
pub const LFS_POINTER_LIMIT: u64 = 1024;

/// How every git-lfs pointer begins; the number of the specification follows.
const LFS_START: &[u8] = b"version https://git-lfs.github.com/spec/";

/// The marks at the beginning of a text that say how it is encoded. That of UTF-32 begins as that
/// of UTF-16 does.
const OTHER_ENCODINGS: [(&[u8], &str); 4] =
    [(b"\xff\xfe\0\0", "UTF-32"), (b"\0\0\xfe\xff", "UTF-32"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16")];

/// Why the bytes of a file are not the content that was expected. The message follows the name of
/// the file.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FileContentError {
    /// The file is a git-lfs pointer. The text names the size and the digest that the pointer
    /// gives.
    #[error("is a git-lfs pointer{0} in place of the file; fetch the file: git lfs pull")]
    LfsPointer(String),
    /// The text begins with the byte order mark of this encoding.
    #[error("is {0} text, as its byte order mark says; save it as UTF-8")]
    OtherEncoding(&'static str),
    /// The text is not UTF-8, and has no byte order mark.
    #[error("is not UTF-8 text (line {}, column {}); save it as UTF-8", place.0, place.1)]
    NotUtf8 {
        /// Line and column of the fault, from 1; columns count bytes.
        place: (usize, usize),
    },
}

/// The text of a file, without the byte order mark that editors on Windows write.
///
/// # Errors
/// If the bytes are a git-lfs pointer, or text in another encoding than UTF-8.
pub fn text(bytes: &[u8]) -> Result<&str, FileContentError> {
    refuse_lfs_pointer(bytes)?;
    if let Some((_, name)) = OTHER_ENCODINGS.iter().find(|(mark, _)| bytes.starts_with(mark)) {
        return Err(FileContentError::OtherEncoding(name));
    }
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let valid = bytes.get(..error.valid_up_to()).unwrap_or_default();
        let line = 1 + valid.iter().filter(|byte| **byte == b'\n').count();
        let column = 1 + valid.iter().rev().take_while(|byte| **byte != b'\n').count();
        FileContentError::NotUtf8 { place: (line, column) }
    })?;
    Ok(text.strip_prefix('\u{feff}').unwrap_or(text))
}

/// Refuses a git-lfs pointer. A checkout has this small text in the place of a large file until
/// git-lfs fetches the file. `bytes` are the whole file. A file above [`LFS_POINTER_LIMIT`] need
/// not be read for this check.
///
/// # Errors
/// If the bytes are a pointer.
pub fn refuse_lfs_pointer(bytes: &[u8]) -> Result<(), FileContentError> {
    if !bytes.starts_with(LFS_START) || bytes.len() as u64 > LFS_POINTER_LIMIT {
        return Ok(());
    }
    let text = String::from_utf8_lossy(bytes);
    let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')).map(str::trim);
    let size = value("size").and_then(|size| size.parse::<u64>().ok());
    let is_digest = |oid: &&str| oid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b':');
    let size = size.map_or_else(String::new, |size| format!(" to {size} bytes"));
    let oid = value("oid").filter(is_digest).map_or_else(String::new, |oid| format!(" ({oid})"));
    Err(FileContentError::LfsPointer(size + &oid))
}

#[cfg(test)]
mod tests {
    use super::*;

    const POINTER: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n";

    fn refusal(bytes: &[u8]) -> String {
        text(bytes).unwrap_err().to_string()
    }

    #[test]
    fn a_pointer_says_the_size_and_the_digest_of_its_file() {
        let words = "is a git-lfs pointer to 12345 bytes (sha256:4d7a214614ab2935) in place of the file; \
                     fetch the file: git lfs pull";
        assert_eq!(refusal(POINTER.as_bytes()), words);
        assert_eq!(refusal(POINTER.replace('\n', "\r\n").as_bytes()), words);
        let hostile = format!("{}oid \u{1b}[2J\nsize -1\n", "version https://git-lfs.github.com/spec/v1\n");
        assert!(refusal(hostile.as_bytes()).starts_with("is a git-lfs pointer in place"), "{hostile:?}");
    }

    #[test]
    fn a_text_about_pointers_is_no_pointer() {
        let long = POINTER.to_owned() + &"x".repeat(1024);
        for other in ["# version https://git-lfs.github.com/spec/v1", "version: 1\n", &long] {
            assert_eq!(text(other.as_bytes()), Ok(other));
            assert_eq!(refuse_lfs_pointer(other.as_bytes()), Ok(()));
        }
        assert_eq!(text(b""), Ok(""));
    }

    #[test]
    fn the_mark_of_utf_8_is_skipped_once_and_others_are_named() {
        assert_eq!(text("\u{feff}a\u{feff}".as_bytes()), Ok("a\u{feff}"));
        assert_eq!(text("\u{feff}".as_bytes()), Ok(""));
        assert_eq!(refusal(b"\xff\xfec\0"), "is UTF-16 text, as its byte order mark says; save it as UTF-8");
        assert!(refusal(b"\xfe\xff\0c").starts_with("is UTF-16 text"));
        assert!(refusal(b"\xff\xfe\0\0c\0\0\0").starts_with("is UTF-32 text"));
        assert!(refusal(b"\0\0\xfe\xff\0\0\0c").starts_with("is UTF-32 text"));
    }

    #[test]
    fn other_bytes_are_refused_with_their_place() {
        assert_eq!(refusal(b"ab\nc\xe9t"), "is not UTF-8 text (line 2, column 2); save it as UTF-8");
        assert_eq!(text(b"\xe9"), Err(FileContentError::NotUtf8 { place: (1, 1) }));
    }
}
