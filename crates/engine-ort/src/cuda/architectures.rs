//! The GPUs that a library has code for, read from its file. A loaded library reports missing code
//! only at the first kernel.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result, Seek, SeekFrom};
use std::path::Path;

use crate::elf;

/// The section in which CUDA's compiler puts code for GPUs. It has containers ("fatbins") with an
/// entry for each architecture. NVIDIA documents neither; `tools/strip_fatbin.py` reads the same
/// format.
const SECTION: &str = ".nv_fatbin";
const CONTAINER: u32 = 0xba55_ed50;
/// Kinds of entries: text that the driver compiles, and machine code.
const PTX: u16 = 1;
const MACHINE_CODE: [u16; 2] = [2, 0x10];
/// Bytes of a container's header, and of the part of an entry's header that is read.
const HEADER: u64 = 16;
const ENTRY: u64 = 32;
/// The most headers that are read; a library of 284 MB has some thousands.
const MOST_HEADERS: u32 = 1 << 20;

/// The architectures that a library has code for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Architectures {
    /// Compute capabilities times ten.
    machine_code: BTreeSet<u32>,
    ptx: BTreeSet<u32>,
}

impl Architectures {
    /// Reads the architectures from a library's file until they are `enough`. It reads only the
    /// headers of the code.
    ///
    /// # Errors
    /// If the file has no code for GPUs, or code in an unknown format.
    pub fn read(path: &Path, enough: impl Fn(&Architectures) -> bool) -> Result<Architectures> {
        from(&mut File::open(path)?, enough)
    }

    /// Whether a GPU of this compute capability can run some of the code. That is machine code for
    /// the same major version and no newer minor one, or PTX that is no newer. Code that runs only
    /// on one variant of an architecture is not recognised as such.
    pub fn includes(&self, (major, minor): (u32, u32)) -> bool {
        let gpu = major * 10 + minor;
        self.machine_code.range(major * 10..=gpu).next().is_some() || self.ptx.range(..=gpu).next().is_some()
    }
}

impl fmt::Display for Architectures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |all: &BTreeSet<u32>, what: &str| -> Vec<String> {
            all.iter().map(|number| format!("{}.{}{what}", number / 10, number % 10)).collect()
        };
        let all = [shown(&self.machine_code, ""), shown(&self.ptx, " and newer")].concat();
        match all.split_last() {
            Some((last, [])) => f.write_str(last),
            Some((last, others)) => write!(f, "{} and {last}", others.join(", ")),
            None => f.write_str("no GPU"),
        }
    }
}

fn from(file: &mut (impl Read + Seek), enough: impl Fn(&Architectures) -> bool) -> Result<Architectures> {
    let invalid = |what: &str, at: u64| Error::new(ErrorKind::InvalidData, format!("{what} at offset {at:#x}"));
    let (mut at, length) =
        elf::section(file, SECTION)?.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("no section {SECTION}")))?;
    let end = at.saturating_add(length);
    let mut found = Architectures::default();
    let mut headers = 0;
    let mut count = |at| {
        headers += 1;
        if headers > MOST_HEADERS { Err(invalid("too many headers", at)) } else { Ok(()) }
    };
    while at.saturating_add(HEADER) <= end {
        count(at)?;
        let header: [u8; HEADER as usize] = read(file, at)?;
        if u32_at(&header, 0) != CONTAINER {
            // Containers are aligned, with zeros between them.
            if header[..8] != [0; 8] {
                return Err(invalid("unknown data", at));
            }
            at += 8;
            continue;
        }
        let mut entry_at = at.saturating_add(u64::from(u16_at(&header, 6)));
        at = entry_at.saturating_add(u64_at(&header, 8));
        if at > end {
            return Err(invalid("a container that is cut short", entry_at));
        }
        while entry_at.saturating_add(ENTRY) <= at {
            count(entry_at)?;
            let entry: [u8; ENTRY as usize] = read(file, entry_at)?;
            let (kind, architecture) = (u16_at(&entry, 0), u32_at(&entry, 28));
            if kind == PTX {
                found.ptx.insert(architecture);
            } else if MACHINE_CODE.contains(&kind) {
                found.machine_code.insert(architecture);
            }
            let (head, payload) = (u32_at(&entry, 4), u64_at(&entry, 8));
            if u64::from(head) < ENTRY {
                return Err(invalid("an unknown entry", entry_at));
            }
            entry_at = entry_at.saturating_add(u64::from(head)).saturating_add(payload);
        }
        if enough(&found) {
            break;
        }
    }
    match found == Architectures::default() {
        true => Err(invalid("no code", end)),
        false => Ok(found),
    }
}

fn read<const N: usize>(file: &mut (impl Read + Seek), at: u64) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    file.seek(SeekFrom::Start(at))?;
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).and_then(|bytes| bytes.try_into().ok()).map_or(0, u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    fn container(entries: &[(u16, u32)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (kind, architecture) in entries {
            bytes.extend(kind.to_le_bytes());
            bytes.extend([1, 1]);
            bytes.extend(64u32.to_le_bytes());
            bytes.extend(24u64.to_le_bytes());
            bytes.extend([0; 12]);
            bytes.extend(architecture.to_le_bytes());
            bytes.extend([0; 32]);
            bytes.extend([0xab; 24]);
        }
        let header = [CONTAINER.to_le_bytes().to_vec(), vec![1, 0, 16, 0], (bytes.len() as u64).to_le_bytes().to_vec()];
        [header.concat(), bytes].concat()
    }

    /// A library of 64 bits with these sections.
    fn library(sections: &[(&str, &[u8])]) -> Vec<u8> {
        let mut names = vec![0];
        let mut table = vec![[0u8; 64]];
        let mut body = vec![0u8; 64];
        let mut header = |name: &str, at: usize, length: usize| {
            let mut header = [0; 64];
            header[..4].copy_from_slice(&(names.len() as u32).to_le_bytes());
            header[24..32].copy_from_slice(&(at as u64).to_le_bytes());
            header[32..40].copy_from_slice(&(length as u64).to_le_bytes());
            names.extend(name.bytes().chain([0]));
            table.push(header);
        };
        for (name, bytes) in sections {
            header(name, body.len(), bytes.len());
            body.extend(*bytes);
        }
        header(".shstrtab", body.len(), 64);
        names.resize(64, 0);
        body.extend(&names);
        body[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let at = (body.len() as u64).to_le_bytes();
        body[40..48].copy_from_slice(&at);
        body[58..60].copy_from_slice(&64u16.to_le_bytes());
        body[60..62].copy_from_slice(&(table.len() as u16).to_le_bytes());
        body[62..64].copy_from_slice(&(table.len() as u16 - 1).to_le_bytes());
        body.extend(table.concat());
        body
    }

    fn found(entries: &[&[(u16, u32)]]) -> Architectures {
        let code: Vec<u8> = entries.iter().flat_map(|entries| [container(entries), vec![0; 8]].concat()).collect();
        let library = library(&[(".text", b"some code"), (SECTION, &code)]);
        from(&mut Cursor::new(library), |_| false).unwrap()
    }

    #[test]
    fn code_of_all_containers_is_found() {
        let found = found(&[&[(2, 75), (2, 80), (2, 86)], &[(2, 89), (0x40, 70), (2, 90), (2, 120)]]);
        assert_eq!(found.to_string(), "7.5, 8.0, 8.6, 8.9, 9.0 and 12.0");
        let runs = [(7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (12, 0), (12, 1)];
        assert!(runs.into_iter().all(|gpu| found.includes(gpu)));
        let not = [(7, 0), (10, 0), (10, 3), (11, 0), (13, 0)];
        assert!(!not.into_iter().any(|gpu| found.includes(gpu)));
    }

    #[test]
    fn machine_code_is_for_no_older_gpu_and_ptx_for_any_newer_one() {
        let newer = found(&[&[(2, 86)]]);
        assert!(!newer.includes((8, 0)) && newer.includes((8, 6)) && newer.includes((8, 9)));
        let text = found(&[&[(1, 90), (2, 80)]]);
        assert!(text.includes((10, 0)) && text.includes((9, 0)) && text.includes((8, 0)) && !text.includes((7, 5)));
        assert_eq!(text.to_string(), "8.0 and 9.0 and newer");
    }

    #[test]
    fn no_more_is_read_than_is_needed() {
        let code = [container(&[(2, 80), (2, 90)]), b"no container".to_vec(), vec![0; 16]].concat();
        let library = library(&[(SECTION, &code)]);
        let read = |gpu| from(&mut Cursor::new(&library), |found| found.includes(gpu));
        assert!(read((9, 0)).is_ok());
        assert!(read((10, 0)).unwrap_err().to_string().contains("unknown data"));
    }

    #[test]
    fn what_is_not_understood_is_an_error_wherever_it_is() {
        let read = |library: &[u8]| from(&mut Cursor::new(library), |_| false);
        assert!(read(b"no library").is_err());
        assert_eq!(read(&library(&[(".text", b"code")])).unwrap_err().kind(), ErrorKind::NotFound);
        assert!(read(&library(&[(SECTION, &container(&[]))])).is_err());
        let whole = library(&[(SECTION, &container(&[(2, 90), (1, 90)]))]);
        // All of the last section's header but its end is read.
        for cut in 0..whole.len() - 24 {
            assert!(read(&whole[..cut]).is_err(), "{cut}");
        }
        for at in 0..whole.len() {
            for byte in [0, 0x7f, 0xff] {
                let mut hostile = whole.clone();
                hostile[at] = byte;
                // Ends without a panic.
                let _ = read(&hostile);
            }
        }
    }
}
