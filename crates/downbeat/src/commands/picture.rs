//! A PNG file as a model's input.

use std::io::Cursor;
use std::path::Path;

use anyhow::{Context, bail};
use bytes::Bytes;
use downbeat_core::tensor::DataType;
use downbeat_protocol::infer::push_number;

/// Largest picture that is decoded, pixels times channels.
const MAX_SAMPLES: usize = 1 << 28;

/// A decoded picture: 8 bits a sample, rows from the top, samples of a pixel together.
#[derive(Debug, PartialEq, Eq)]
pub struct Picture {
    /// Pixels in a row.
    pub width: usize,
    pub height: usize,
    /// Samples of a pixel: 1 (gray) or 3 (red, green, blue).
    pub channels: usize,
    /// `height * width * channels` samples.
    pub samples: Vec<u8>,
}

/// The conversion of samples to numbers (`parameters` of the model's configuration):
/// `sample * scale + offset`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PixelRange {
    /// `pixel_scale`, default 1.
    pub scale: f64,
    /// `pixel_offset`, default 0.
    pub offset: f64,
}

impl Picture {
    /// Decodes a PNG file. Palettes are resolved, 16 bits are cut to 8, transparency is left out.
    ///
    /// # Errors
    /// If the file is no PNG that can be read.
    pub fn decode(file: &Path, bytes: &[u8]) -> anyhow::Result<Picture> {
        Self::of(bytes).with_context(|| format!("{} is not a PNG picture that can be read", file.display()))
    }

    fn of(bytes: &[u8]) -> anyhow::Result<Picture> {
        let mut decoder = png::Decoder::new(Cursor::new(bytes));
        decoder.set_transformations(png::Transformations::normalize_to_color8());
        let mut reader = decoder.read_info()?;
        let size = reader.output_buffer_size().filter(|size| *size <= MAX_SAMPLES);
        let Some(size) = size else { bail!("the picture has more than {MAX_SAMPLES} samples") };
        let mut samples = vec![0; size];
        let frame = reader.next_frame(&mut samples)?;
        samples.truncate(frame.buffer_size());
        let found = frame.color_type.samples();
        // Gray with alpha has 2 samples, colours with alpha have 4.
        let channels = if found < 3 { 1 } else { 3 };
        if found != channels {
            samples = samples.chunks_exact(found).flat_map(|pixel| pixel.iter().take(channels).copied()).collect();
        }
        Ok(Picture { width: frame.width as usize, height: frame.height as usize, channels, samples })
    }

    /// The picture as the elements of one input, with their shape. `dims` is the input's shape
    /// without the batch dimension; -1 fits any size. Nothing is resized. Colours become gray (Rec.
    /// 601) for an input with one sample a pixel.
    ///
    /// # Errors
    /// If the sizes do not fit, or the input holds no numbers.
    pub fn tensor(&self, dims: &[i64], datatype: DataType, range: PixelRange) -> anyhow::Result<(Bytes, Vec<i64>)> {
        let (height, width) = (self.height as i64, self.width as i64);
        let fits = |dims: &[i64], shape: &[i64]| {
            dims.len() == shape.len() && dims.iter().zip(shape).all(|(dim, size)| *dim == -1 || dim == size)
        };
        let gray = || -> Vec<u8> {
            if self.channels == 1 {
                return self.samples.clone();
            }
            let luma = |p: &[u8]| match p {
                [r, g, b] => ((299 * u32::from(*r) + 587 * u32::from(*g) + 114 * u32::from(*b) + 500) / 1000) as u8,
                _ => 0,
            };
            self.samples.chunks_exact(3).map(luma).collect()
        };
        let colours = || -> Vec<u8> {
            if self.channels == 3 {
                return self.samples.clone();
            }
            self.samples.iter().flat_map(|s| [*s; 3]).collect()
        };
        let (samples, shape) = if fits(dims, &[height, width]) {
            (gray(), vec![height, width])
        } else if fits(dims, &[1, height, width]) {
            (gray(), vec![1, height, width])
        } else if fits(dims, &[height, width, 1]) {
            (gray(), vec![height, width, 1])
        } else if fits(dims, &[3, height, width]) {
            let pixels = colours();
            let planes = (0..3).flat_map(|c| pixels.iter().skip(c).step_by(3).copied().collect::<Vec<u8>>());
            (planes.collect(), vec![3, height, width])
        } else if fits(dims, &[height, width, 3]) {
            (colours(), vec![height, width, 3])
        } else if dims.iter().all(|d| *d > 0)
            && dims.iter().try_fold(1_i64, |n, d| n.checked_mul(*d)) == Some(height * width)
        {
            // The model takes all pixels in a row.
            (gray(), dims.to_vec())
        } else {
            bail!(
                "the picture has {width} x {height} pixels, but the input has dims {dims:?} (without the batch); \
                 `downbeat infer` does not resize pictures, so name a picture of the input's size"
            );
        };
        if matches!(datatype, DataType::Bool | DataType::Bytes) {
            bail!("a picture cannot be an input of datatype {datatype}");
        }
        let mut elements = Vec::with_capacity(samples.len() * datatype.size().unwrap_or(1));
        for sample in samples {
            push_number(&mut elements, datatype, f64::from(sample) * range.scale + range.offset);
        }
        Ok((elements.into(), shape))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AS_IT_IS: PixelRange = PixelRange { scale: 1.0, offset: 0.0 };

    fn encode(width: u32, height: u32, colour: png::ColorType, samples: &[u8]) -> Vec<u8> {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, width, height);
        encoder.set_color(colour);
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header().unwrap();
        writer.write_image_data(samples).unwrap();
        writer.finish().unwrap();
        file
    }

    fn decode(file: &[u8]) -> Picture {
        Picture::of(file).unwrap()
    }

    fn floats(bytes: &[u8]) -> Vec<f32> {
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    #[test]
    fn gray_pixels_are_scaled() {
        let picture = decode(&encode(2, 1, png::ColorType::Grayscale, &[0, 255]));
        let range = PixelRange { scale: 1.0 / 255.0, offset: -0.5 };
        let (bytes, shape) = picture.tensor(&[1, -1], DataType::Fp32, range).unwrap();
        assert_eq!(shape, [1, 2]);
        assert_eq!(floats(&bytes), [-0.5, 0.5]);
        let (bytes, shape) = picture.tensor(&[2], DataType::Uint8, AS_IT_IS).unwrap();
        assert_eq!((shape.as_slice(), bytes.as_ref()), ([2].as_slice(), [0, 255].as_slice()), "pixels in a row");
    }

    #[test]
    fn transparency_is_left_out_and_colours_become_planes_or_gray() {
        let picture = decode(&encode(2, 1, png::ColorType::Rgba, &[10, 20, 30, 255, 40, 50, 60, 0]));
        assert_eq!(picture.channels, 3);
        let range = AS_IT_IS;
        let (planes, shape) = picture.tensor(&[3, -1, -1], DataType::Uint8, range).unwrap();
        assert_eq!((shape.as_slice(), planes.as_ref()), ([3, 1, 2].as_slice(), [10, 40, 20, 50, 30, 60].as_slice()));
        let (pixels, _) = picture.tensor(&[1, 2, 3], DataType::Uint8, range).unwrap();
        assert_eq!(pixels.as_ref(), [10, 20, 30, 40, 50, 60]);
        let (gray, _) = picture.tensor(&[1, 2], DataType::Uint8, range).unwrap();
        assert_eq!(gray.as_ref(), [18, 48]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let picture = decode(&encode(2, 1, png::ColorType::Grayscale, &[0, 255]));
        let error = picture.tensor(&[3, 224, 224], DataType::Fp32, AS_IT_IS).unwrap_err().to_string();
        assert!(error.starts_with("the picture has 2 x 1 pixels, but the input has dims [3, 224, 224]"), "{error}");
        assert!(picture.tensor(&[1, 2], DataType::Bytes, AS_IT_IS).is_err());
    }

    #[test]
    fn a_damaged_file_is_refused() {
        let file = encode(2, 2, png::ColorType::Grayscale, &[0, 1, 2, 3]);
        for cut in 0..file.len() - 12 {
            assert!(Picture::of(&file[..cut]).is_err(), "{cut}");
        }
        // A header that promises 2^31 x 2^31 pixels.
        let mut huge = file;
        huge[16..24].copy_from_slice(&[0x7f, 0xff, 0xff, 0xff, 0x7f, 0xff, 0xff, 0xff]);
        assert!(Picture::of(&huge).is_err());
    }
}
