//! Library files: their sections, and a check that no bytes are missing. The loader makes no such
//! check: it maps the file. A process that reads behind the end of a truncated file is killed.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// The largest number of program headers, and of sections, that are read; a library has some tens.
const MOST_SEGMENTS: u64 = 1 << 10;

/// Checks that an ELF file has all bytes that its headers mention.
pub(crate) fn check_whole(path: &Path) -> Result<(), String> {
    let mut file = File::open(path).map_err(|e| e.to_string())?;
    let length = file.metadata().map_err(|e| e.to_string())?.len();
    if cfg!(target_os = "macos") {
        return Ok(());
    }
    let needed = needed(&mut file).map_err(|_| "it is cut short inside its headers".to_owned())?;
    let needed = needed.ok_or("it is no library")?;
    if needed > length {
        return Err(format!("it is cut short: {length} of at least {needed} bytes are there"));
    }
    Ok(())
}

/// The end of the bytes that the headers mention; 0 if the file is not 64-bit or has another byte
/// order. `None`: no ELF file.
fn needed(file: &mut (impl Read + Seek)) -> std::io::Result<Option<u64>> {
    let mut header = [0; 64];
    let mut magic = [0; 4];
    if file.read_exact(&mut magic).is_err() || magic != *b"\x7fELF" {
        return Ok(None);
    }
    file.seek(SeekFrom::Start(0))?;
    file.read_exact(&mut header)?;
    // EI_CLASS, EI_DATA: 32 bits, or the highest byte first.
    if header[4] == 1 || header[5] == 2 {
        return Ok(Some(0));
    }
    let half = |at: usize| u64::from(u16::from_le_bytes([header[at], header[at + 1]]));
    let (e_phoff, e_shoff) = (word(&header, 32), word(&header, 40));
    let (e_phentsize, e_phnum, e_shentsize, e_shnum) = (half(54), half(56), half(58), half(60));
    // The table of sections is behind all else in most libraries.
    let mut end = e_shoff.saturating_add(e_shentsize * e_shnum).max(e_phoff.saturating_add(e_phentsize * e_phnum));
    for index in 0..e_phnum.min(MOST_SEGMENTS) {
        let mut segment = [0; 56];
        file.seek(SeekFrom::Start(e_phoff.saturating_add(index * e_phentsize)))?;
        file.read_exact(&mut segment)?;
        // p_offset, p_filesz
        end = end.max(word(&segment, 8).saturating_add(word(&segment, 32)));
    }
    Ok(Some(end))
}

/// The start and the size in bytes of a section of a 64-bit file of this byte order; `None`: no
/// section has the name.
pub(crate) fn section(file: &mut (impl Read + Seek), name: &str) -> std::io::Result<Option<(u64, u64)>> {
    let mut header = [0; 64];
    file.seek(SeekFrom::Start(0))?;
    file.read_exact(&mut header)?;
    if header[..6] != *b"\x7fELF\x02\x01" {
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, "not a library of 64 bits"));
    }
    let half = |at: usize| u64::from(u16::from_le_bytes([header[at], header[at + 1]]));
    let (e_shoff, e_shentsize, e_shnum, e_shstrndx) = (word(&header, 40), half(58), half(60), half(62));
    let mut section = |index: u64| -> std::io::Result<(u64, u64, u64)> {
        let mut section = [0; 40];
        file.seek(SeekFrom::Start(e_shoff.saturating_add(index * e_shentsize)))?;
        file.read_exact(&mut section)?;
        // sh_name, sh_offset, sh_size
        Ok((word(&section, 0) & 0xffff_ffff, word(&section, 24), word(&section, 32)))
    };
    let (_, names, _) = section(e_shstrndx)?;
    let sections = (0..e_shnum.min(MOST_SEGMENTS)).map(section).collect::<std::io::Result<Vec<_>>>()?;
    let mut found = vec![0; name.len() + 1];
    for (name_at, offset, size) in sections {
        file.seek(SeekFrom::Start(names.saturating_add(name_at)))?;
        // The last names of a file may be shorter than the wanted name.
        if file.read_exact(&mut found).is_ok() && found.strip_suffix(&[0]) == Some(name.as_bytes()) {
            return Ok(Some((offset, size)));
        }
    }
    Ok(None)
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let eight = bytes.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
    eight.map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    #[test]
    fn what_is_cut_short_anywhere_is_seen() {
        let whole = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let length = whole.len() as u64;
        let promised = needed(&mut Cursor::new(&whole)).unwrap().unwrap();
        assert!(promised <= length && promised > length / 2, "{promised} of {length}");
        for cut in [64, 65, 500, whole.len() / 2] {
            let needed = needed(&mut Cursor::new(&whole[..cut]));
            assert!(needed.map_or(true, |needed| needed > Some(cut as u64)), "{cut}");
        }
        assert!(needed(&mut Cursor::new(&whole[..63])).is_err());
        assert_eq!(needed(&mut Cursor::new(b"no library")).unwrap(), None);
        assert_eq!(needed(&mut Cursor::new(b"")).unwrap(), None);
        let mut hostile = whole[..64].to_vec();
        hostile[32..64].fill(0xff);
        assert!(needed(&mut Cursor::new(&hostile)).map_or(true, |needed| needed > Some(64)));
    }
}
