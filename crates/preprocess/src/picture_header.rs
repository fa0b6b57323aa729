//! Reads the format and size of a JPEG or PNG from its first bytes.

/// Segments of a JPEG before its frame header; cameras write some tens.
const MOST_SEGMENTS: usize = 4096;

/// Most bytes that deflate can make of one byte.
const MOST_DEFLATED: u64 = 1032;

/// The format and size of a picture, from its first bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PictureHeader {
    /// The picture's format.
    pub format: PictureFormat,
    /// Pixels in a row, at least one.
    pub width: u32,
    /// Rows, at least one.
    pub height: u32,
}

/// The format of a picture.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PictureFormat {
    /// JPEG, row after row.
    Jpeg,
    /// JPEG, from coarse to fine: all coefficients are kept until the end.
    ProgressiveJpeg,
    /// PNG.
    Png,
}

impl PictureHeader {
    /// Reads the header, in time that grows with the header alone and without memory of its own.
    ///
    /// # Errors
    /// In words, if the bytes have no such header.
    pub fn read(bytes: &[u8]) -> Result<Self, String> {
        if bytes.is_empty() {
            return Err("the picture is empty; expected a JPEG or PNG".to_owned());
        }
        let found = match bytes {
            [0xff, 0xd8, rest @ ..] => jpeg(rest)?,
            [0x89, b'P', b'N', b'G', 0x0d, 0x0a, 0x1a, 0x0a, rest @ ..] => png(rest)?,
            _ => return Err("the picture is neither a JPEG nor a PNG".to_owned()),
        };
        if found.width == 0 || found.height == 0 {
            return Err(format!("the picture has {} x {} pixels", found.width, found.height));
        }
        Ok(found)
    }

    /// Checks that a file of this length can hold the pixels of a PNG at all. Deflate makes at most
    /// 1032 bytes of one.
    ///
    /// # Errors
    /// In words, if the file is too short.
    pub fn check_length(&self, bytes: &[u8]) -> Result<(), String> {
        if self.format != PictureFormat::Png {
            return Ok(());
        }
        let (Some(depth), Some(color)) = (bytes.get(24), bytes.get(25)) else {
            return Err("the picture is a damaged PNG that ends in its header".to_owned());
        };
        let samples = match color {
            2 => 3,
            4 => 2,
            6 => 4,
            _ => 1,
        };
        let least = self.pixels().saturating_mul(samples * u64::from(*depth)) / 8 / MOST_DEFLATED;
        match least <= bytes.len() as u64 {
            true => Ok(()),
            false => Err(format!(
                "the picture is a damaged PNG: {} x {} pixels take at least {least} bytes, but the file has {}",
                self.width,
                self.height,
                bytes.len()
            )),
        }
    }

    /// The number of pixels.
    pub fn pixels(&self) -> u64 {
        u64::from(self.width) * u64::from(self.height)
    }

    /// Bytes that a decoder holds for a pixel at its peak: three samples, and the coefficients of a
    /// progressive JPEG.
    pub fn bytes_per_pixel(&self) -> u64 {
        match self.format {
            PictureFormat::Jpeg | PictureFormat::Png => 3,
            PictureFormat::ProgressiveJpeg => 3 + 3 * 2,
        }
    }
}

/// The header of a PNG after its signature: `IHDR` comes first (PNG specification §5.6).
fn png(rest: &[u8]) -> Result<PictureHeader, String> {
    match rest {
        [0, 0, 0, 13, b'I', b'H', b'D', b'R', w0, w1, w2, w3, h0, h1, h2, h3, ..] => Ok(PictureHeader {
            format: PictureFormat::Png,
            width: u32::from_be_bytes([*w0, *w1, *w2, *w3]),
            height: u32::from_be_bytes([*h0, *h1, *h2, *h3]),
        }),
        _ => Err("the picture begins as a PNG, but has no header".to_owned()),
    }
}

/// The frame header of a JPEG after its first marker (ITU T.81 §B.2.2).
fn jpeg(mut rest: &[u8]) -> Result<PictureHeader, String> {
    let cut = || "the picture begins as a JPEG, but ends before its frame header".to_owned();
    for _ in 0..MOST_SEGMENTS {
        while let [0xff, after @ ..] = rest
            && after.first() == Some(&0xff)
        {
            rest = after;
        }
        let [0xff, marker, after @ ..] = rest else { return Err(cut()) };
        let format = match marker {
            0x01 | 0xd0..=0xd7 => {
                rest = after;
                continue;
            }
            0xc0 | 0xc1 => Some(PictureFormat::Jpeg),
            0xc2 => Some(PictureFormat::ProgressiveJpeg),
            0xc3 | 0xc5..=0xc7 | 0xc9..=0xcb | 0xcd..=0xcf => {
                return Err(
                    "the picture is a JPEG of a kind that the server cannot read: lossless, hierarchical or arithmetic"
                        .to_owned(),
                );
            }
            0xd9 | 0xda => return Err("the picture is a JPEG without a frame header".to_owned()),
            _ => None,
        };
        if let Some(format) = format {
            let [_, _, _, h0, h1, w0, w1, ..] = after else { return Err(cut()) };
            let (height, width) = (u16::from_be_bytes([*h0, *h1]).into(), u16::from_be_bytes([*w0, *w1]).into());
            return Ok(PictureHeader { format, width, height });
        }
        let Some(length) = after.first_chunk().map(|length| usize::from(u16::from_be_bytes(*length))) else {
            return Err(cut());
        };
        rest = after.get(length.max(2)..).ok_or_else(cut)?;
    }
    Err(format!("the picture is a JPEG with {MOST_SEGMENTS} segments or more before its frame header"))
}
