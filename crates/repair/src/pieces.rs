//! A file as pieces: ranges of another file, and new bytes.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;

use downbeat_engine::onnx::message::{put, put_head};

/// A file as pieces.
#[derive(Debug, Default)]
pub(crate) struct Pieces(Vec<Piece>);

#[derive(Debug)]
enum Piece {
    /// Bytes of the old file.
    Kept(Range<u64>),
    /// New bytes.
    New(Vec<u8>),
}

impl Pieces {
    /// Appends a range of the old file.
    pub fn keep(&mut self, range: Range<u64>) {
        match self.0.last_mut() {
            Some(Piece::Kept(last)) if last.end == range.start => last.end = range.end,
            _ => self.0.push(Piece::Kept(range)),
        }
    }

    /// Appends new bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        match self.0.last_mut() {
            Some(Piece::New(last)) => last.extend_from_slice(bytes),
            _ => self.0.push(Piece::New(bytes.to_owned())),
        }
    }

    /// Appends a string or message in field `number`.
    pub fn field(&mut self, number: u64, content: &[u8]) {
        let mut field = Vec::new();
        put(&mut field, number, content);
        self.add(&field);
    }

    /// Appends a message in field `number`.
    pub fn message(&mut self, number: u64, message: Pieces) {
        let mut head = Vec::new();
        put_head(&mut head, number, message.len());
        self.add(&head);
        for piece in message.0 {
            match piece {
                Piece::Kept(range) => self.keep(range),
                Piece::New(bytes) => self.add(&bytes),
            }
        }
    }

    /// Bytes of all pieces.
    pub fn len(&self) -> u64 {
        let len = |piece: &Piece| match piece {
            Piece::Kept(range) => range.end - range.start,
            Piece::New(bytes) => bytes.len() as u64,
        };
        self.0.iter().map(len).sum()
    }

    /// Writes all pieces. `old` is the file that the ranges belong to.
    pub fn write(&self, old: &mut File, to: &mut impl Write) -> io::Result<()> {
        for piece in &self.0 {
            match piece {
                Piece::New(bytes) => to.write_all(bytes)?,
                Piece::Kept(range) => {
                    let len = range.end - range.start;
                    old.seek(SeekFrom::Start(range.start))?;
                    let copied = io::copy(&mut Read::by_ref(old).take(len), to)?;
                    if copied != len {
                        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the model file became shorter"));
                    }
                }
            }
        }
        Ok(())
    }
}
