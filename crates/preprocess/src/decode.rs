//! Decodes the pixels of a JPEG or PNG.

use std::io::Cursor;

use downbeat_protocol::pace;
use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

use crate::picture_header::{PictureFormat, PictureHeader};

/// Most scans of a progressive JPEG. Encoders write about ten; the cost of each grows with the
/// picture's size.
const MOST_SCANS: usize = 64;

/// A decoded picture: 8 bits a sample, rows from the top, the samples of a pixel together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Picture {
    /// Pixels in a row.
    pub width: u32,
    /// Rows.
    pub height: u32,
    /// Samples of a pixel: 1 (gray) or 3 (red, green, blue).
    pub channels: usize,
    /// `height * width * channels` samples.
    pub samples: Vec<u8>,
}

/// Decodes a picture. `header` is the header of the same bytes, and the caller has limited its size
/// to the memory that may be used. The result has `channels` samples a pixel, 1 or 3.
///
/// # Errors
/// In words, if the picture is damaged or of an unsupported kind.
pub fn decode(bytes: &[u8], header: PictureHeader, channels: usize) -> Result<Picture, String> {
    let decoded = match header.format {
        PictureFormat::Png => png(bytes, header)?,
        PictureFormat::Jpeg | PictureFormat::ProgressiveJpeg => jpeg(bytes, header)?,
    };
    Ok(decoded.with_channels(channels))
}

fn png(bytes: &[u8], header: PictureHeader) -> Result<Picture, String> {
    let wrong = |error: png::DecodingError| format!("the picture is a damaged PNG: {error}");
    let mut decoder = png::Decoder::new(Cursor::new(bytes));
    decoder.set_transformations(png::Transformations::normalize_to_color8());
    let mut reader = decoder.read_info().map_err(wrong)?;
    check_size(header, reader.info().width, reader.info().height)?;
    let size = reader.output_buffer_size().ok_or("the picture is a PNG larger than the memory")?;
    let mut samples = zeros(if reader.info().interlaced { size } else { 0 })?;
    if reader.info().interlaced {
        let frame = reader.next_frame(&mut samples).map_err(wrong)?;
        samples.truncate(frame.buffer_size());
    } else {
        reserve(&mut samples, size)?;
        while let Some(row) = reader.next_row().map_err(wrong)? {
            pace::step(row.data().len() as u64);
            samples.extend_from_slice(row.data());
        }
    }
    let found = reader.output_color_type().0.samples();
    // Gray with alpha has 2 samples, colours with alpha have 4.
    let channels = if found < 3 { 1 } else { 3 };
    if found != channels {
        drop_alpha(&mut samples, found);
    }
    Ok(Picture { width: header.width, height: header.height, channels, samples })
}

/// Removes the last of every `found` samples, in place.
fn drop_alpha(samples: &mut Vec<u8>, found: usize) {
    let mut index = 0;
    samples.retain(|_| {
        index += 1;
        index % found != 0
    });
}

fn jpeg(bytes: &[u8], header: PictureHeader) -> Result<Picture, String> {
    let wrong = |error: zune_jpeg::errors::DecodeErrors| format!("the picture is a damaged JPEG: {error}");
    let options = DecoderOptions::default()
        .set_strict_mode(true)
        .set_max_width(header.width as usize)
        .set_max_height(header.height as usize)
        .jpeg_set_max_scans(MOST_SCANS)
        .jpeg_set_out_colorspace(ColorSpace::RGB);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(wrong)?;
    let (width, height) = decoder.dimensions().ok_or("the picture is a JPEG without a frame header")?;
    check_size(header, width as u32, height as u32)?;
    let mut samples = zeros(decoder.output_buffer_size().ok_or("the picture is a JPEG larger than the memory")?)?;
    decoder.decode_into(&mut samples).map_err(wrong)?;
    Ok(Picture { width: header.width, height: header.height, channels: 3, samples })
}

/// Checks that the decoder finds the size of the header: only that size was allowed for.
fn check_size(header: PictureHeader, width: u32, height: u32) -> Result<(), String> {
    if (width, height) == (header.width, header.height) {
        return Ok(());
    }
    Err(format!(
        "the picture's header gives {} x {} pixels, but another part of the picture gives {width} x {height}",
        header.width, header.height
    ))
}

pub(crate) fn zeros(bytes: usize) -> Result<Vec<u8>, String> {
    let mut zeros = Vec::new();
    reserve(&mut zeros, bytes)?;
    zeros.resize(bytes, 0);
    Ok(zeros)
}

fn reserve(samples: &mut Vec<u8>, bytes: usize) -> Result<(), String> {
    samples
        .try_reserve_exact(bytes)
        .map_err(|_| format!("the server has no memory for the picture's {bytes} bytes of samples"))
}

impl Picture {
    /// The same picture with this number of samples a pixel, 1 or 3.
    fn with_channels(self, channels: usize) -> Picture {
        let samples = match (self.channels, channels) {
            (3, 1) => self.samples.as_chunks::<3>().0.iter().map(brightness).collect(),
            (1, 3) => self.samples.iter().flat_map(|sample| [*sample; 3]).collect(),
            _ => return self,
        };
        Picture { channels, samples, ..self }
    }
}

/// The brightness as Pillow computes its `L`.
fn brightness(&[r, g, b]: &[u8; 3]) -> u8 {
    ((u32::from(r) * 19595 + u32::from(g) * 38470 + u32::from(b) * 7471 + 0x8000) >> 16) as u8
}
